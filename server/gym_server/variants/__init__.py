"""Personal variants that contributors keep on the hub.

Neighbours: imports accounts, ledger, store; imported by federation, rpc.
"""
