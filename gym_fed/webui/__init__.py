"""The workbench of `gym webui`. Its runs are independent processes that outlive it."""
