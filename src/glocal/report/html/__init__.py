"""`glocal report`: runs of one or two stores as one HTML file that needs no network."""
