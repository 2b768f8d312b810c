"""The other side: one module for each library that reads an export back, in a process of its own."""
