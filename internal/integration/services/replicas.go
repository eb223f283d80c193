package services

import (
	"bytes"
	"database/sql"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// A Pair is a database on two servers that belong to one test. The primary accepts writes, and the other server
// replicates the primary.
type Pair struct {
	// Addrs are the addresses of the two servers. The first server is the primary until Swap is called.
	Addrs [2]string
	// DSN returns the DSN of the database for an address.
	DSN func(addr string) string
	// Swap makes the second server the primary and the first server read-only. It may be called only once.
	Swap func()
}

// A server is a program that belongs to one test, with a folder that the user of the program can access.
type server struct {
	t    testing.TB
	dir  string
	cred *syscall.Credential // nil means the user of the test
}

// newServer returns a server that does not run as root.
func newServer(t testing.TB) *server {
	t.Helper()
	s := &server{t: t}
	var err error
	if s.dir, err = os.MkdirTemp("", "replica"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(s.dir) })
	if os.Getuid() == 0 {
		u, err := user.Lookup("nobody")
		if err != nil {
			t.Fatal(err)
		}
		uid, _ := strconv.ParseUint(u.Uid, 10, 32)
		gid, _ := strconv.ParseUint(u.Gid, 10, 32)
		s.cred = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		if err := os.Chown(s.dir, int(uid), int(gid)); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func (s *server) path(name string) string { return filepath.Join(s.dir, name) }

// run runs a program and waits until it ends.
func (s *server) run(program string, args ...string) {
	s.t.Helper()
	out := new(bytes.Buffer)
	cmd := s.start(out, program, args...)
	if err := cmd.Wait(); err != nil {
		s.t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

func (s *server) start(out *bytes.Buffer, program string, args ...string) *exec.Cmd {
	s.t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, out, out
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.cred}
	cmd.WaitDelay = 5 * time.Second // a server that the program has started may keep the output open
	if err := cmd.Start(); err != nil {
		s.t.Fatalf("%s: %v", cmd, err)
	}
	return cmd
}

// postgresProgram returns the path of a PostgreSQL program. Some systems do not have these programs in PATH.
func postgresProgram(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name); len(found) > 0 {
			return found[len(found)-1]
		}
		missing(t, "the program "+name, err)
	}
	return path
}

// NewPostgresPair starts a PostgreSQL server and a standby server, on free ports of the loopback interface. They end
// with the test.
func NewPostgresPair(t testing.TB) *Pair {
	t.Helper()
	initdb, ctl, backup := postgresProgram(t, "initdb"), postgresProgram(t, "pg_ctl"), postgresProgram(t, "pg_basebackup")
	s := newServer(t)
	pair := &Pair{
		Addrs: [2]string{FreeAddr(t), FreeAddr(t)},
		DSN:   func(addr string) string { return "postgres://app@" + addr + "/postgres?sslmode=disable" },
	}
	data := [2]string{s.path("a"), s.path("b")}
	config := func(i int, text string) {
		f, err := os.OpenFile(filepath.Join(data[i], "postgresql.auto.conf"), os.O_APPEND|os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteString(text)
			_ = f.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	port := func(i int) string {
		_, port, _ := net.SplitHostPort(pair.Addrs[i])
		return "\nport = " + port + "\n"
	}
	start := func(i int) { s.run(ctl, "-D", data[i], "-l", data[i]+".log", "-w", "-t", "60", "start") }
	stop := func(i int, mode string) *exec.Cmd {
		return s.start(new(bytes.Buffer), ctl, "-D", data[i], "-m", mode, "-w", "stop")
	}
	s.run(initdb, "-D", data[0], "-U", "app", "-A", "trust", "-N")
	config(0, "fsync = off\nunix_socket_directories = ''\nlisten_addresses = '127.0.0.1'\n"+port(0))
	t.Cleanup(func() { _ = stop(0, "immediate").Wait() })
	start(0)
	host, at, _ := net.SplitHostPort(pair.Addrs[0])
	s.run(backup, "-h", host, "-p", at, "-U", "app", "-D", data[1], "-R", "-c", "fast")
	config(1, port(1))
	t.Cleanup(func() { _ = stop(1, "immediate").Wait() })
	start(1)
	pair.Swap = func() {
		t.Helper()
		if err := stop(0, "fast").Wait(); err != nil {
			t.Fatal(err)
		}
		s.run(ctl, "-D", data[1], "-w", "promote")
		host, at, _ := net.SplitHostPort(pair.Addrs[1])
		config(0, fmt.Sprintf("\nprimary_conninfo = 'host=%s port=%s user=app'\n", host, at))
		if err := os.WriteFile(filepath.Join(data[0], "standby.signal"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		start(0)
	}
	return pair
}

// NewMariaDBPair starts two MariaDB servers on free ports of the loopback interface. The second server replicates the
// first. They end with the test. The user of the DSN cannot write to a server that is read_only.
func NewMariaDBPair(t testing.TB) *Pair {
	t.Helper()
	program := func(name string) string {
		path, err := exec.LookPath(name)
		if err != nil {
			missing(t, "the program "+name, err)
		}
		return path
	}
	install, mariadbd := program("mariadb-install-db"), program("mariadbd")
	s := newServer(t)
	pair := &Pair{
		Addrs: [2]string{FreeAddr(t), FreeAddr(t)},
		DSN:   func(addr string) string { return "app@tcp(" + addr + ")/app" },
	}
	var root [2]*sql.DB
	for i := range root {
		data := s.path("data" + strconv.Itoa(i))
		s.run(install, "--no-defaults", "--datadir="+data, "--auth-root-authentication-method=normal", "--skip-test-db")
		_, port, _ := net.SplitHostPort(pair.Addrs[i])
		socket := s.path("s" + strconv.Itoa(i))
		out := new(bytes.Buffer)
		cmd := s.start(out, mariadbd, "--no-defaults", "--datadir="+data,
			"--bind-address=127.0.0.1", "--port="+port, "--socket="+socket,
			"--server-id="+strconv.Itoa(i+1), "--log-bin=binlog", "--read-only="+strconv.Itoa(i),
			"--innodb-flush-log-at-trx-commit=0",
			"--innodb-buffer-pool-size=32M")
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if t.Failed() {
				t.Logf("mariadbd %d:\n%s", i, out)
			}
		})
		var err error
		if root[i], err = sql.Open("mysql", "root@unix("+socket+")/"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = root[i].Close() })
		for deadline := time.Now().Add(time.Minute); root[i].Ping() != nil; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("mariadbd does not answer")
			}
		}
	}
	exec := func(i int, statements ...string) {
		t.Helper()
		for _, statement := range statements {
			if _, err := root[i].Exec(statement); err != nil {
				t.Fatalf("%s: %v", statement, err)
			}
		}
	}
	follow := func(i int) {
		t.Helper()
		host, port, _ := net.SplitHostPort(pair.Addrs[1-i])
		exec(i, "CHANGE MASTER TO MASTER_HOST = '"+host+"', MASTER_PORT = "+port+
			", MASTER_USER = 'app', MASTER_USE_GTID = slave_pos", "START SLAVE")
	}
	caughtUp := func() {
		t.Helper()
		var position string
		var late int
		if err := root[0].QueryRow("SELECT @@gtid_binlog_pos").Scan(&position); err != nil {
			t.Fatal(err)
		}
		if err := root[1].QueryRow("SELECT MASTER_GTID_WAIT(?, 60)", position).Scan(&late); err != nil || late != 0 {
			t.Fatalf("the second server does not follow the first: %d %v", late, err)
		}
	}
	exec(0, "CREATE DATABASE app", "CREATE USER app@'%'",
		"GRANT ALL ON app.* TO app@'%'", "GRANT REPLICATION SLAVE ON *.* TO app@'%'")
	follow(1)
	caughtUp()
	pair.Swap = func() {
		t.Helper()
		exec(0, "SET GLOBAL read_only = 1")
		caughtUp()
		exec(1, "STOP SLAVE", "SET GLOBAL read_only = 0")
		exec(0, "SET GLOBAL gtid_slave_pos = @@gtid_binlog_pos")
		follow(0)
	}
	return pair
}
