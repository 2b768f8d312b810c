"""AWQ and GPTQ: 4-bit weights in groups, calibrated by auto-round in a child process."""
