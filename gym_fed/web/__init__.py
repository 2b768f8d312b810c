"""Shared parts of the hub's dashboard and the workbench: login, live events, static files and the web server.

The pages are ES modules without a build step (``static/``). They read a JSON API and a stream of server-sent events.
"""
