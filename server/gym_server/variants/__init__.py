"""Personal variants that contributors keep on the hub."""
