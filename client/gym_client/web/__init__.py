"""The contributor's pages: join a hub, watch the work, pause, set hours, leave."""
