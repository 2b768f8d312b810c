"""Changes to the code of a loaded model that its saved folder carries: longer rotary positions, routed blocks."""
