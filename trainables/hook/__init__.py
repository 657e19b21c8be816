"""What programs of users import, from a folder that is on their path: files that know nothing of Wattune's own."""
