"""What `make test-gpu` runs on one CUDA GPU, and the section of docs/support.md that it writes."""
