"""Where the time of a rank's steps goes while it trains, and which rank the others wait for (docs/slow-ranks.md)."""
