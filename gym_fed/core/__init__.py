"""The common ground of every package: errors, files, processes, text, the terminal and the registries."""
