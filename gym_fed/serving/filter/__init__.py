"""The content filter of `gym api`: rules by category, streaming that holds back text, and a classifier."""
