package harm

// Lost has the rows that are lost today, by table and name. The text begins with the package that
// has to change and says what is wrong with it.
var Lost = map[string]string{}
