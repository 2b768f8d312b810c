"""Model folders and changes to a loaded model that they record: adapters, RoPE scaling, routed blocks."""
