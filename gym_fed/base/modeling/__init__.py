"""Model folders and the changes to a loaded model recorded in them: adapters, RoPE scaling, routed blocks."""
