"""Ways to train a layout: a folder for each, imported only where it is used."""
