"""How artifacts are stored: file format, codec, schema versions and migrations, summaries, Perfetto traces."""
