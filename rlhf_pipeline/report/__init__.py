"""Reading run folders: curves, pages, and rewards graded again from what is stored. Nothing here imports torch."""
