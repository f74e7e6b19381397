"""Tables, figures and progress bars."""
