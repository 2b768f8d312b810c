"""One file a step, in the order of their revisions. A step that was released is never changed."""
