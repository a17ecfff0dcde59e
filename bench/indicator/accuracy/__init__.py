"""What plans do to what is learned: paired training runs behind ``docs/results/accuracy.json``."""
