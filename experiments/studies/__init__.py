"""The project's studies, and the language in which a study is written."""
