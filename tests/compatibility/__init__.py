"""What training scripts use beside QSync: each row of docs/compatibility.md, run."""
