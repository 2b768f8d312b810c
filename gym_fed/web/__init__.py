"""What the hub's dashboard and the workbench share: login, live events, the static front end, and the server.

The pages are ES modules without a build step (``static/``). They read a JSON API and one stream of server-sent events.
"""
