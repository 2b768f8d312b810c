"""Dashboards and alert rules as tables: ``hub.py``, ``api.py`` and ``client.py`` list what is shown and what alerts."""
