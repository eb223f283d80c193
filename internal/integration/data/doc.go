// Package data tests resiliencesql, resilienceredis and resiliencepgx against real servers.
package data
