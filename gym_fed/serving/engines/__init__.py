"""The kinds of engine that a server can use: one file each; dropping a file in registers it."""
