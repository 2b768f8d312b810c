"""Tool call formats, one file each: how models write them, and how they are parsed, constrained and rendered."""
