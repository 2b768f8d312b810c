"""The hub's dashboard: what the database holds as pages, live while the hub runs, and read-only when it is stopped.

<<<<<<< HEAD
Neighbours: imports cli, federation, ledger, store; imported by cli.
=======
Neighbours: imports cli, federation, store; imported by cli.
>>>>>>> cd541165 (Name the neighbours of the workbench's folders)

Neighbours: imports cli, federation, ledger, store; imported by cli.
"""
