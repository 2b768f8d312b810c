"""One module per thing that `gym doctor` looks at."""
