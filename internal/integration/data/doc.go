// Package data tests resiliencesql, resilienceredis and resiliencepgx on real servers.
package data
