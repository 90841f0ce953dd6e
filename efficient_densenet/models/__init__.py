"""The networks: their structure, their variants, and how a network becomes a backbone."""
