"""The contributor's web pages: join a hub, watch the work, pause it, set its hours, and leave."""
