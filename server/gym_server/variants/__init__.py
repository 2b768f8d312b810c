"""Personal variants that contributors store on the hub."""
