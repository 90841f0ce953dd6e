"""What the networks are: their structure, their variants, and how one becomes a backbone."""
