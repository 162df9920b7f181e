"""What a setting in shadow is asked about a request. A file for each question; `room` is what several have to know."""
