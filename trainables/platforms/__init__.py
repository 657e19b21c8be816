"""Kinds of devices that ranks train on: a module for each, imported only where it is used."""
