package harm

// Lost contains the rows that are currently lost. A key is the name of a table, a slash and the name of a row. The
// text starts with the package that must be fixed and describes the problem.
var Lost = map[string]string{}
