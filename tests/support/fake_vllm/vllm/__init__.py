"""What stands for vLLM: its command line and the URLs that the gateway uses. An answer repeats the prompt's tokens."""
