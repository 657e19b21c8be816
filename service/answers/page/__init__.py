"""The report of a search as one page: tables of what the record holds, figures of these, and the page around them."""
