"""What is measured on machines."""
