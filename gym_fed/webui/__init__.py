"""The workbench of `gym webui`, whose runs are independent processes that outlive it."""
