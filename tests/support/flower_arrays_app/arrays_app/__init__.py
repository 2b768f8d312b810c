"""The code of a Flower app whose server merges plain arrays by DeltaSoupStrategy."""
