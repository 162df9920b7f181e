"""What a setting in shadow is asked about a request. One file for each question, under the setting's name."""
