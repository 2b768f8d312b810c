"""Checks that `make test-gpu` runs on one CUDA GPU; they write a section of docs/support.md."""
