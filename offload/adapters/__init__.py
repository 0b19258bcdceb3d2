"""What knows a third-party library; one file each."""
