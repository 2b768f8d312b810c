"""Dashboards and alert rules as tables: ``hub.py``, ``api.py`` and ``client.py`` list the panels and the alerts."""
