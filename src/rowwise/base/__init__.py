"""What any program of files and processes needs: text files, values, quantities, folders and object stores."""
