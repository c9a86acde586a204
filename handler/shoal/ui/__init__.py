"""What the notebooks show: tables, plots, players and buttons. Calls the library; the library never calls it."""
