"""DeltaSoup: robust aggregators and the recipes that use them."""
