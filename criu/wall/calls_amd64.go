package wall

import (
	"strconv"
	"strings"
	"sync"
)

const (
	archAMD64 = 0xc000003e
	archI386  = 0x40000003
	bitX32    = 0x40000000
)

// entries are the ways in which a process can call the kernel: of x86-64, of x32, of i386.
var entries = sync.OnceValue(func() []entry {
	amd64, x32, i386 := map[uint32]string{}, map[uint32]string{}, map[uint32]string{}
	for word := range strings.FieldsSeq(calls) {
		name, numbers, _ := strings.Cut(word, "=")
		of64, of32, _ := strings.Cut(numbers, "/")
		if n, err := strconv.ParseUint(of64, 10, 32); err == nil {
			amd64[uint32(n)], x32[uint32(n)|bitX32] = name, name
		}
		if n, err := strconv.ParseUint(of32, 10, 32); err == nil {
			i386[uint32(n)] = name
		}
	}
	for i, name := range strings.Fields(callsX32) {
		x32[uint32(firstX32+i)|bitX32] = name
	}
	return []entry{{"X86_64", archAMD64, 0, amd64}, {"X32", archAMD64, bitX32, x32}, {"X86", archI386, 0, i386}}
})

const firstX32 = 512

// callsX32 are what x32 has numbers of its own for, from firstX32 on.
const callsX32 = `
	rt_sigaction rt_sigreturn ioctl readv writev recvfrom sendmsg recvmsg execve ptrace rt_sigpending rt_sigtimedwait rt_sigqueueinfo sigaltstack
	timer_create mq_notify kexec_load waitid set_robust_list get_robust_list vmsplice move_pages preadv pwritev rt_tgsigqueueinfo recvmmsg sendmmsg
	process_vm_readv process_vm_writev setsockopt getsockopt io_setup io_submit execveat preadv2 pwritev2`

// calls are the system calls with their numbers of x86-64 and i386, as TestCalls has them of package unix.
const calls = `
	_llseek=/140 _newselect=/142 _sysctl=156/149 accept=43/ accept4=288/364 access=21/33 acct=163/51 add_key=248/286 adjtimex=159/124 afs_syscall=183/137
	alarm=37/27 arch_prctl=158/384 bdflush=/134 bind=49/361 bpf=321/357 break=/17 brk=12/45 cachestat=451/451 capget=125/184 capset=126/185 chdir=80/12
	chmod=90/15 chown=92/182 chown32=/212 chroot=161/61 clock_adjtime=305/343 clock_adjtime64=/405 clock_getres=229/266 clock_getres_time64=/406
	clock_gettime=228/265 clock_gettime64=/403 clock_nanosleep=230/267 clock_nanosleep_time64=/407 clock_settime=227/264 clock_settime64=/404
	clone=56/120 clone3=435/435 close=3/6 close_range=436/436 connect=42/362 copy_file_range=326/377 creat=85/8 create_module=174/127
	delete_module=176/129 dup=32/41 dup2=33/63 dup3=292/330 epoll_create=213/254 epoll_create1=291/329 epoll_ctl=233/255 epoll_ctl_old=214/
	epoll_pwait=281/319 epoll_pwait2=441/441 epoll_wait=232/256 epoll_wait_old=215/ eventfd=284/323 eventfd2=290/328 execve=59/11 execveat=322/358
	exit=60/1 exit_group=231/252 faccessat=269/307 faccessat2=439/439 fadvise64=221/250 fadvise64_64=/272 fallocate=285/324 fanotify_init=300/338
	fanotify_mark=301/339 fchdir=81/133 fchmod=91/94 fchmodat=268/306 fchmodat2=452/452 fchown=93/95 fchown32=/207 fchownat=260/298 fcntl=72/55
	fcntl64=/221 fdatasync=75/148 fgetxattr=193/231 file_getattr=468/468 file_setattr=469/469 finit_module=313/350 flistxattr=196/234 flock=73/143
	fork=57/2 fremovexattr=199/237 fsconfig=431/431 fsetxattr=190/228 fsmount=432/432 fsopen=430/430 fspick=433/433 fstat=5/108 fstat64=/197
	fstatat64=/300 fstatfs=138/100 fstatfs64=/269 fsync=74/118 ftime=/35 ftruncate=77/93 ftruncate64=/194 futex=202/240 futex_requeue=456/456
	futex_time64=/422 futex_wait=455/455 futex_waitv=449/449 futex_wake=454/454 futimesat=261/299 get_kernel_syms=177/130 get_mempolicy=239/275
	get_robust_list=274/312 get_thread_area=211/244 getcpu=309/318 getcwd=79/183 getdents=78/141 getdents64=217/220 getegid=108/50 getegid32=/202
	geteuid=107/49 geteuid32=/201 getgid=104/47 getgid32=/200 getgroups=115/80 getgroups32=/205 getitimer=36/105 getpeername=52/368 getpgid=121/132
	getpgrp=111/65 getpid=39/20 getpmsg=181/188 getppid=110/64 getpriority=140/96 getrandom=318/355 getresgid=120/171 getresgid32=/211 getresuid=118/165
	getresuid32=/209 getrlimit=97/76 getrusage=98/77 getsid=124/147 getsockname=51/367 getsockopt=55/365 gettid=186/224 gettimeofday=96/78 getuid=102/24
	getuid32=/199 getxattr=191/229 getxattrat=464/464 gtty=/32 idle=/112 init_module=175/128 inotify_add_watch=254/292 inotify_init=253/291
	inotify_init1=294/332 inotify_rm_watch=255/293 io_cancel=210/249 io_destroy=207/246 io_getevents=208/247 io_pgetevents=333/385
	io_pgetevents_time64=/416 io_setup=206/245 io_submit=209/248 io_uring_enter=426/426 io_uring_register=427/427 io_uring_setup=425/425 ioctl=16/54
	ioperm=173/101 iopl=172/110 ioprio_get=252/290 ioprio_set=251/289 ipc=/117 kcmp=312/349 kexec_file_load=320/ kexec_load=246/283 keyctl=250/288
	kill=62/37 landlock_add_rule=445/445 landlock_create_ruleset=444/444 landlock_restrict_self=446/446 lchown=94/16 lchown32=/198 lgetxattr=192/230
	link=86/9 linkat=265/303 listen=50/363 listmount=458/458 listns=470/470 listxattr=194/232 listxattrat=465/465 llistxattr=195/233 lock=/53
	lookup_dcookie=212/253 lremovexattr=198/236 lseek=8/19 lsetxattr=189/227 lsm_get_self_attr=459/459 lsm_list_modules=461/461 lsm_set_self_attr=460/460
	lstat=6/107 lstat64=/196 madvise=28/219 map_shadow_stack=453/453 mbind=237/274 membarrier=324/375 memfd_create=319/356 memfd_secret=447/447
	migrate_pages=256/294 mincore=27/218 mkdir=83/39 mkdirat=258/296 mknod=133/14 mknodat=259/297 mlock=149/150 mlock2=325/376 mlockall=151/152 mmap=9/90
	mmap2=/192 modify_ldt=154/123 mount=165/21 mount_setattr=442/442 move_mount=429/429 move_pages=279/317 mprotect=10/125 mpx=/56 mq_getsetattr=245/282
	mq_notify=244/281 mq_open=240/277 mq_timedreceive=243/280 mq_timedreceive_time64=/419 mq_timedsend=242/279 mq_timedsend_time64=/418 mq_unlink=241/278
	mremap=25/163 mseal=462/462 msgctl=71/402 msgget=68/399 msgrcv=70/401 msgsnd=69/400 msync=26/144 munlock=150/151 munlockall=152/153 munmap=11/91
	name_to_handle_at=303/341 nanosleep=35/162 newfstatat=262/ nfsservctl=180/169 nice=/34 oldfstat=/28 oldlstat=/84 oldolduname=/59 oldstat=/18
	olduname=/109 open=2/5 open_by_handle_at=304/342 open_tree=428/428 open_tree_attr=467/467 openat=257/295 openat2=437/437 pause=34/29
	perf_event_open=298/336 personality=135/136 pidfd_getfd=438/438 pidfd_open=434/434 pidfd_send_signal=424/424 pipe=22/42 pipe2=293/331
	pivot_root=155/217 pkey_alloc=330/381 pkey_free=331/382 pkey_mprotect=329/380 poll=7/168 ppoll=271/309 ppoll_time64=/414 prctl=157/172 pread64=17/180
	preadv=295/333 preadv2=327/378 prlimit64=302/340 process_madvise=440/440 process_mrelease=448/448 process_vm_readv=310/347 process_vm_writev=311/348
	prof=/44 profil=/98 pselect6=270/308 pselect6_time64=/413 ptrace=101/26 putpmsg=182/189 pwrite64=18/181 pwritev=296/334 pwritev2=328/379
	query_module=178/167 quotactl=179/131 quotactl_fd=443/443 read=0/3 readahead=187/225 readdir=/89 readlink=89/85 readlinkat=267/305 readv=19/145
	reboot=169/88 recvfrom=45/371 recvmmsg=299/337 recvmmsg_time64=/417 recvmsg=47/372 remap_file_pages=216/257 removexattr=197/235 removexattrat=466/466
	rename=82/38 renameat=264/302 renameat2=316/353 request_key=249/287 restart_syscall=219/0 rmdir=84/40 rseq=334/386 rseq_slice_yield=471/471
	rt_sigaction=13/174 rt_sigpending=127/176 rt_sigprocmask=14/175 rt_sigqueueinfo=129/178 rt_sigreturn=15/173 rt_sigsuspend=130/179
	rt_sigtimedwait=128/177 rt_sigtimedwait_time64=/421 rt_tgsigqueueinfo=297/335 sched_get_priority_max=146/159 sched_get_priority_min=147/160
	sched_getaffinity=204/242 sched_getattr=315/352 sched_getparam=143/155 sched_getscheduler=145/157 sched_rr_get_interval=148/161
	sched_rr_get_interval_time64=/423 sched_setaffinity=203/241 sched_setattr=314/351 sched_setparam=142/154 sched_setscheduler=144/156
	sched_yield=24/158 seccomp=317/354 security=185/ select=23/82 semctl=66/394 semget=64/393 semop=65/ semtimedop=220/ semtimedop_time64=/420
	sendfile=40/187 sendfile64=/239 sendmmsg=307/345 sendmsg=46/370 sendto=44/369 set_mempolicy=238/276 set_mempolicy_home_node=450/450
	set_robust_list=273/311 set_thread_area=205/243 set_tid_address=218/258 setdomainname=171/121 setfsgid=123/139 setfsgid32=/216 setfsuid=122/138
	setfsuid32=/215 setgid=106/46 setgid32=/214 setgroups=116/81 setgroups32=/206 sethostname=170/74 setitimer=38/104 setns=308/346 setpgid=109/57
	setpriority=141/97 setregid=114/71 setregid32=/204 setresgid=119/170 setresgid32=/210 setresuid=117/164 setresuid32=/208 setreuid=113/70
	setreuid32=/203 setrlimit=160/75 setsid=112/66 setsockopt=54/366 settimeofday=164/79 setuid=105/23 setuid32=/213 setxattr=188/226 setxattrat=463/463
	sgetmask=/68 shmat=30/397 shmctl=31/396 shmdt=67/398 shmget=29/395 shutdown=48/373 sigaction=/67 sigaltstack=131/186 signal=/48 signalfd=282/321
	signalfd4=289/327 sigpending=/73 sigprocmask=/126 sigreturn=/119 sigsuspend=/72 socket=41/359 socketcall=/102 socketpair=53/360 splice=275/313
	ssetmask=/69 stat=4/106 stat64=/195 statfs=137/99 statfs64=/268 statmount=457/457 statx=332/383 stime=/25 stty=/31 swapoff=168/115 swapon=167/87
	symlink=88/83 symlinkat=266/304 sync=162/36 sync_file_range=277/314 syncfs=306/344 sysfs=139/135 sysinfo=99/116 syslog=103/103 tee=276/315
	tgkill=234/270 time=201/13 timer_create=222/259 timer_delete=226/263 timer_getoverrun=225/262 timer_gettime=224/261 timer_gettime64=/408
	timer_settime=223/260 timer_settime64=/409 timerfd_create=283/322 timerfd_gettime=287/326 timerfd_gettime64=/410 timerfd_settime=286/325
	timerfd_settime64=/411 times=100/43 tkill=200/238 truncate=76/92 truncate64=/193 tuxcall=184/ ugetrlimit=/191 ulimit=/58 umask=95/60 umount=/22
	umount2=166/52 uname=63/122 unlink=87/10 unlinkat=263/301 unshare=272/310 uprobe=336/ uretprobe=335/ uselib=134/86 userfaultfd=323/374 ustat=136/62
	utime=132/30 utimensat=280/320 utimensat_time64=/412 utimes=235/271 vfork=58/190 vhangup=153/111 vm86=/166 vm86old=/113 vmsplice=278/316
	vserver=236/273 wait4=61/114 waitid=247/284 waitpid=/7 write=1/4 writev=20/146`
