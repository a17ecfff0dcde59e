"""A job out of a script that trains already: from its live model, optimizer, loss and loader."""
