"""CSV and text files of any size, through an index of where each record begins."""
